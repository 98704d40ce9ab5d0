"""Files that ship with Rackless: icons, themes, lock files, tables, the demo's model and text."""
