"""What scheduler and stages send each other."""
