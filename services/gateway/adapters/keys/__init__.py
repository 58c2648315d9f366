"""Where API keys are kept: nowhere, in a file, or in Redis."""
