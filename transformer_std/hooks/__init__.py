"""Values by name, read and written where they are computed."""
