"""Record what ranks compute, send and wait for, and measure what of it is not hidden."""
