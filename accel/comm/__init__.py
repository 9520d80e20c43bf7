"""How processes talk: one `Communicator` per kind of transport."""
