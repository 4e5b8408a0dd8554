package migrations

// For tests that bring small schemas of their own.
var (
	UpFS     = up
	StatusFS = status
	Load     = load
)

// LockID is the key of the advisory lock.
const LockID = lockID
