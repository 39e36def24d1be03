"""What `auto` goes by: the kinds of passes, and the table of measured winners that every process of a training job reads."""
