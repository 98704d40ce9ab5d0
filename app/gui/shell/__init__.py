"""The main window, its menus, its commands and its tray icon."""
