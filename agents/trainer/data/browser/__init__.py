"""Look through the rows of data: a program that answers requests about one data set."""
