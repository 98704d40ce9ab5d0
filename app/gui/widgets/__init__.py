"""Small parts that pages and windows are made of."""
