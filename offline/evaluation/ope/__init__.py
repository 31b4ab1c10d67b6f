"""What a policy is worth, from episodes that another one made."""
