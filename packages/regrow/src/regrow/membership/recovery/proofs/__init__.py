"""Evidence about newcomers: who shows when that it could take the place of a rank."""
