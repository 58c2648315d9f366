"""What only a worker on CUDA needs: its device, and the checks before it starts."""
