// Package cluster knows the other nodes and speaks with them.
package cluster
