"""Reading captures: queries, and sending the wanted rows of the wanted frames."""
