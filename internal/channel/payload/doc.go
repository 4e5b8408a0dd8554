// Package payload reads JSON bodies that came from outside, and decides once which text, numbers and nesting the rest of
// the program has to cope with.
//
// A leaf: it imports the standard library only, starts no goroutine and keeps no state. It never panics on a body; what
// it cannot accept is one of its Err values. Tests: tables, and a fuzz target beside encoding/json.
package payload
