"""Are steps simulated right?"""
