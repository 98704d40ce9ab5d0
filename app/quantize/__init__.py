"""Making smaller models of trained ones: what it will take."""
