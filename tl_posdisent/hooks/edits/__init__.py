"""What an edit of a head is, and how the edits of a layer are carried out in a forward pass."""
