"""Time steps fairly, and write the results together with the hardware and versions they ran on."""
