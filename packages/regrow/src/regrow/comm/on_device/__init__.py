"""Parts of groups on devices beside their transport: an abort without Python, and waits that only the device shows."""
