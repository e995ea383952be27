"""What a run is and what it leaves: the recipe, the folder, its state and its log."""
