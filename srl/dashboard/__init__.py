"""A web page over the tasks of a broker; it only reads."""
