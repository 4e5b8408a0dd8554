package postgres

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/puddle/v2"
)

// SQLSTATE codes, from appendix A of the Postgres manual.
const (
	codeReadOnly             = "25006" // read_only_sql_transaction
	codeIdleInTransaction    = "25P03" // idle_in_transaction_session_timeout
	codeSerialization        = "40001" // serialization_failure
	codeDeadlock             = "40P01" // deadlock_detected
	codeLockNotAvailable     = "55P03" // lock_not_available
	codeQueryCanceled        = "57014" // query_canceled: statement_timeout, or an operator's pg_cancel_backend
	codeIOError              = "58030" // io_error
	classConnection          = "08"    // connection_exception
	classInsufficientRes     = "53"    // insufficient_resources: too_many_connections, disk_full, out_of_memory
	classOperator            = "57P"   // admin_shutdown, crash_shutdown, cannot_connect_now, database_dropped, ...
	classConstraintViolation = "23"    // integrity_constraint_violation
)

// IsUnavailable reports whether err, an error of a database call, means that the database cannot serve for the moment:
// refused or lost connection, shutdown or start in progress, no connection free in the given time, a read-only server,
// no resources, a statement that ran into its time limit. The request may be tried again later (503 with Retry-After).
//
// It is false for nil, for a cancelled context (the client went away, nobody reads the answer), and for errors that are
// about the statement itself. A passed deadline counts: the database did not answer in the time it was given. err must
// come from a database call: network errors of anything else look the same.
func IsUnavailable(err error) bool {
	if err == nil || errors.Is(err, context.Canceled) {
		return false
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) && unavailableCode(pg.Code) {
		return true
	}
	// A refused log-in arrives as a ConnectError around a PgError: whatever the reason, no query can run.
	var connect *pgconn.ConnectError
	if errors.As(err, &connect) {
		return true
	}
	if pg != nil {
		return false
	}
	var network net.Error
	return errors.As(err, &network) ||
		errors.Is(err, context.DeadlineExceeded) || // also the wait for a free connection of the pool
		errors.Is(err, puddle.ErrClosedPool) ||
		errors.Is(err, pgconn.ErrConnClosed) ||
		errors.Is(err, net.ErrClosed) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func unavailableCode(code string) bool {
	switch code {
	case codeReadOnly, codeIdleInTransaction, codeQueryCanceled, codeIOError:
		return true
	}
	return strings.HasPrefix(code, classConnection) ||
		strings.HasPrefix(code, classInsufficientRes) ||
		strings.HasPrefix(code, classOperator)
}

// Constraint gives the name of the unique, foreign-key, check or exclusion constraint that err reports as violated, as
// the migration named it, or "" when err is no such violation. (A not-null violation has no name.)
func Constraint(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && strings.HasPrefix(pg.Code, classConstraintViolation) {
		return pg.ConstraintName
	}
	return ""
}

// IsSerialization reports whether the transaction was sacrificed to a concurrent one (serialization failure or
// deadlock): run it again from its beginning.
func IsSerialization(err error) bool {
	return hasCode(err, codeSerialization) || hasCode(err, codeDeadlock)
}

// IsLockTimeout reports whether a lock was not had within the caller's lock_timeout, or at once with NOWAIT.
func IsLockTimeout(err error) bool { return hasCode(err, codeLockNotAvailable) }

func hasCode(err error, code string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == code
}
