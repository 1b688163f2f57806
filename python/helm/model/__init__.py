"""What a model is: its configuration, its checkpoint and its graph; knows no machine."""
