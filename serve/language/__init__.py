"""Language policies: a gateway in front of engines that run the versions of aliases."""
