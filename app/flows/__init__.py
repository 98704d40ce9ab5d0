"""Logic of dialogs and wizards without Qt: questions, answers, checks, what comes next."""
