// Package owner counts each key at one node.
package owner
