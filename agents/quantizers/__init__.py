"""What makes other files of a finished run: for now the merge of an adapter into its base model."""
