"""What the gateway adds to a replica, and what it withstands: measured from outside, against a scripted replica."""
