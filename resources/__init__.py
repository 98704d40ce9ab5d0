"""Files that ship with Rackless: icons, themes, lock files, tables, and the demo's model and text."""
