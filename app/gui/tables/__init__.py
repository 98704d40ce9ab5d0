"""Tables: one model for all, columns as data, delegates that draw states and progress."""
