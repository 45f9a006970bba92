"""Groups on devices, beside their transport: waits that only the device knows about."""
