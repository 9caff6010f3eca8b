"""Reading captures: what is asked for, and which rows of which frames are sent."""
