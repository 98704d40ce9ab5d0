"""Objects that live as long as the window: the bridge to the core, the live state, preferences."""
