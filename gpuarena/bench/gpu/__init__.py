"""What only a GPU can show: each check passes or fails, and gives figures."""
