// Package openapi makes the OpenAPI 3.1 description of the hub's HTTP API.
//
// It decides how an operation is described. What a route demands (credential, scope, bucket, body, path) comes from the
// route table, as a list of [Route], and is never written a second time: security, path parameters, the headers and the
// 429 of its limit, and every problem that the guards can answer follow from it. The rest is written by hand, in the
// YAML files of this folder, one for each resource: what an operation is for, its query, its body, its answers, and the
// problems of its own. [common.yaml] holds what they share, and says in its first lines how the files are written.
//
// To describe a new route, add an operation under its method and pattern to the file of its resource. A test of
// internal/http says what is missing and where it goes, and holds every answer of every other test against the
// description.
//
// It imports nothing of ours and owns no goroutine. [Load] fails on a file that can't be read, a word that is not
// understood or a reference to nothing, and a program that can't describe itself does not start. A route without a
// description, or the reverse, is no failure: [Document.Gaps] lists them, for the test.
//
// Tests read the real files; those that need the router stand in internal/http (openapi_test.go).
package openapi
