"""What the first call with some shapes decides for all later ones: argument checks, schedule, choice of methods, plan."""
