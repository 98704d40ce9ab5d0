"""Theme, icons and the small widgets that every page is made of."""
