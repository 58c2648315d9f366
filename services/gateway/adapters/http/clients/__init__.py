"""The routes of the API for clients, of all dialects."""
