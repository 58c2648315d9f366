"""The truth of a request: what was asked, what was delivered, and how tokens become text."""
