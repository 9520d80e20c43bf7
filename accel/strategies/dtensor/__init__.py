"""What the backends share whose parameters are DTensors on one mesh; no backend itself."""
