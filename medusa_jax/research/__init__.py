"""What reproduces the papers: the family like for like, recipes side by side, costs by shape."""
