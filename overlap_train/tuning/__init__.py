"""`overlap-train tune`: measurements of whole operators on all ranks make the table of overlap_train/tuned. Only when asked."""
