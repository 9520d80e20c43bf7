"""Models larger than the memory of one device: sizes, device maps, hooks, offloading."""
