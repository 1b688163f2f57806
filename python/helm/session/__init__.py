"""A loaded model and those who use it; knows no command line."""
