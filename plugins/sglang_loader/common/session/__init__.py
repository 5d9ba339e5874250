"""A session between one trainer rank and one engine rank: messages, socket, folder of sockets."""
