"""Options: removable parts of the gateway. Each option is a folder."""
