"""The broker, room by room: each folder tests the room of `broker/` with its name."""
