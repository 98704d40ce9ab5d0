"""Logic of dialogs and wizards without Qt: questions, answers, checks and the next step."""
