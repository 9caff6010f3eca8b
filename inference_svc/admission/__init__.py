"""All checks of a request before anything is promised. Pure: nothing here waits, or keeps anything."""
