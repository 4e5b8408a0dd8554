// Package report prints what the measuring commands have in common: the machine, and a table in Markdown.
//
// It imports the standard library only, owns no goroutine and returns no errors. Its test is a table.
package report
