"""Options: parts of the gateway that not every request needs, each a folder."""
