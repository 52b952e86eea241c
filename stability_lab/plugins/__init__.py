"""Classes and configs of the user's own packages: which of them are trusted, and how they are found."""
