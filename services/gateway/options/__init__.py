"""Options are parts of the gateway that not every request needs. Each option is a folder."""
