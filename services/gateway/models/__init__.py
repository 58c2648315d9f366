"""Several models behind one gateway: each request is served by the parts of the model it names."""
